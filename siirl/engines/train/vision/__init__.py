"""Images beside packed tokens: their patches and places, and what the decoder reads of them."""
