"""The command ``aztask``: one file per command; `main` knows them all and loads what is used."""
