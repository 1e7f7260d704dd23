"""The administration API: Atom entries over HTTP, as the administration clients speak it."""
