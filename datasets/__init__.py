"""Tables and what is derived from them: schema, store, features, reward, episodes, splits."""
