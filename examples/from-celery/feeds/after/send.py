"""Send two feeds; the second one fails once."""

from proj import tasks

tasks.fetch.delay("https://example.com/a.xml")
tasks.fetch.with_options(delay=0.2).delay("https://example.com/b.xml", fail_until=1)
