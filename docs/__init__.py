"""Pages for users, and the site of all pages."""
