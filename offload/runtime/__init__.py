"""Memory, files, devices and lanes: what runs ops. It knows no modules and no parameters."""
