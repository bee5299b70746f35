"""Schedules in the forms of other tools, out and in. Their letters and conventions live here alone."""
