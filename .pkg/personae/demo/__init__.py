"""The models and adapters that come with Personae: links to `evals/demo`, which trains them."""
