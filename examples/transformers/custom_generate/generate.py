"""A `custom_generate` recipe: in a model's repository it makes `generate` specpool's."""

from specpool import transformers


def generate(model, inputs=None, **arguments):
    """Called by transformers with everything that `model.generate` was given."""
    return transformers.generate(model, arguments.pop("input_ids", inputs), **arguments)
