"""What ``aztask doctor`` looks at, and what a worker says when it starts."""
