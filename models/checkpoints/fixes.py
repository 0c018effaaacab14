"""What helps against a checkpoint that is damaged, incomplete, or of a model that is not supported."""

DOWNLOAD_AGAIN = "download the checkpoint again (download.py resumes and replaces what is missing)"
CONVERT_AGAIN = "convert the checkpoint again (convert_hf_checkpoint.py --force)"
USE_PLAIN = "use a plain Llama, Mistral or Qwen2 checkpoint with its own config.json, downloaded whole"
