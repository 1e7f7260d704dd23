"""``python -m aztask`` runs the command ``aztask``."""

from aztask.operate.cli.main import main

if __name__ == "__main__":
    main()
