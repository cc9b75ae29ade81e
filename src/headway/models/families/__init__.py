"""The families that Headway brings along, one module each: what they do otherwise than `models.family.Family`."""
