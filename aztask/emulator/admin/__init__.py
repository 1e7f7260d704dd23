"""The administration API: Atom entries over HTTP, for the SDKs' administration clients."""
