"""A shop whose orders are fulfilled by functions, whatever dies in between."""
