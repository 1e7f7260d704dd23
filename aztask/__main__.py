"""``python -m aztask`` runs the command ``aztask``."""

from aztask.cli.main import main

if __name__ == "__main__":
    main()
