"""Who calls aiockpt: adapters for the worlds around it, each imported by name where it is used."""
