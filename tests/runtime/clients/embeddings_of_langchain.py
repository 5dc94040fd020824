"""langchain-openai's embeddings against a server: python embeddings_of_langchain.py URL MODEL; what came is printed as JSON."""

import json
import sys
from typing import Any

import openai
from langchain_openai import OpenAIEmbeddings

URL, MODEL = sys.argv[1:]
TEXTS = ["How tall is it?", "b"]


def client(**options: Any) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(base_url=URL, api_key="none", model=MODEL, max_retries=0, **options)


def main() -> None:
    # Otherwise it asks for the files of OpenAI's tokenizer and sends their token ids.
    texts = client(check_embedding_ctx_length=False)
    found: dict[str, Any] = {"documents": texts.embed_documents(TEXTS), "query": texts.embed_query(TEXTS[0])}
    found["short"] = client(check_embedding_ctx_length=False, dimensions=16).embed_query(TEXTS[0])
    raw = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
    found["tokens"] = raw.embeddings.create(model=MODEL, input=[[5, 6, 7]]).data[0].embedding
    try:
        texts.embed_query("")
    except openai.APIStatusError as error:
        found["refused"] = [error.status_code, error.code]
    print(json.dumps(found))


main()
