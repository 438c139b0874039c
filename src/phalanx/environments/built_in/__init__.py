"""Built-in environments and tools: the module `name` has the class `Name`."""
