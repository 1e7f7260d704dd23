"""Result stores: one protocol, `aztask.results.base`, in a local file or in Azure Tables."""
