"""Where brokers and result stores are: addresses, and the URLs and strings that name them."""
