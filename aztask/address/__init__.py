"""Addresses of brokers and result stores, and the URLs and connection strings that name them."""
