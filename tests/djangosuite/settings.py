"""Settings for Django's tests, which override TASKS themselves."""

SECRET_KEY = "for tests"
USE_TZ = True
INSTALLED_APPS = ["aztask.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
