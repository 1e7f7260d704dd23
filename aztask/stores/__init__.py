"""The store of rows: one port, over SQLite and over Azure Tables; see `aztask.stores.rows`."""
