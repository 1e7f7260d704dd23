"""How tests name their resource group."""

RESOURCE_GROUP_PARAM = "resource_group"
