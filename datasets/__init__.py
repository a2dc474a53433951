"""Tables and what is made of them: schema, store, features, reward, episodes, splits."""
