"""Connection strings of the services in these tests."""

from azurite import ACCOUNT, KEY

BUS_KEY = "c3BhcmstdGVzdC1rZXktMDEyMzQ1Njc4OQ=="


def queues_at(port):
    """The connection string of Azurite's queues, or of a proxy before them."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"QueueEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    )


def blobs_at(port):
    """The connection string of Azurite's blobs."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    )


def bus_at(port):
    """The connection string of the Service Bus emulator."""
    return (
        f"Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName=RootManageSharedAccessKey;"
        f"SharedAccessKey={BUS_KEY};UseDevelopmentEmulator=true"
    )
