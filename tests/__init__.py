"""The tests: units mirror the modules, the rest is named after trouble."""
