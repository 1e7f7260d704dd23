"""Result stores: one protocol, `aztask.stores.records.base`, in a local file or in Azure Tables."""
