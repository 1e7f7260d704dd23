"""Django's commands of the app ``aztask.django``."""
