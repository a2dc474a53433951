"""A judge with frozen worlds: anybody's answers, by a truth without noise."""
