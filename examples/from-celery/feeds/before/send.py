"""Send two feeds; the second one fails once."""

from proj.celery import app
from proj.tasks import fetch

app.set_default()
fetch.delay("https://example.com/a.xml")
fetch.apply_async(("https://example.com/b.xml",), {"fail_until": 1}, countdown=0.2)
