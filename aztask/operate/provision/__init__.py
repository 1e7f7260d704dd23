"""What an app needs on Azure: a plan, files that make it, and how it differs from what is there."""
