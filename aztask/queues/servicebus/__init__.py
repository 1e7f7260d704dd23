"""The Service Bus broker, over ``azure-servicebus``."""
