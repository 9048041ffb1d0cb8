"""What each notebook measures and the tidy tables that its figures draw, a module a notebook."""
