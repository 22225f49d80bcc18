"""Reading layers out of folders of safetensors files. Imported when it is used."""
