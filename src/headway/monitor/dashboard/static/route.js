// Addresses within the page: #/run/<name>/<tab>/...?query

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

export const runLink = (run, ...rest) => `#/run/${[run, ...rest].map(encodeURIComponent).join("/")}`;
