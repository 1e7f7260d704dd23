"""Moving an app to another address: its messages, and whose its rows are. ``aztask move``."""
