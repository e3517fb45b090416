"""What users need to test their own tasks; may import all, imported by none."""
