"""What jaxmoe is measured against: one file per competitor."""
