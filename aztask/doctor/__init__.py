"""The checks of ``aztask doctor``, some of which a worker also runs when it starts."""
