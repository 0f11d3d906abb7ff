"""A soak of a served model: many streams for an hour, with clients that leave and hostile ones."""
