"""Built-in environments and tools: the class `Name` in the module `name`."""
