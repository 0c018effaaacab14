"""An HTTP server over the engine's `Decoder`: text-generation-inference's and OpenAI's routes, continuous batching."""
