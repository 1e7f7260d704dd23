"""The services of these tests, as connection strings."""

from azurite import ACCOUNT, KEY

BUS_KEY = "c3BhcmstdGVzdC1rZXktMDEyMzQ1Njc4OQ=="


def queues_at(port):
    """Azurite's queues, or what stands in front of them."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"QueueEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    )


def blobs_at(port):
    """Azurite's blobs."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    )


def bus_at(port):
    """The emulator of Service Bus."""
    return (
        f"Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName=RootManageSharedAccessKey;"
        f"SharedAccessKey={BUS_KEY};UseDevelopmentEmulator=true"
    )
