"""TensorRT engines for verifier and draft head; ONNX Runtime runs the same graphs on a CPU."""
