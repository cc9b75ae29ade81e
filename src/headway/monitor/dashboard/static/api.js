// Talking to the server: JSON by GET, and one stream of events that says which runs have grown.

import { notice } from "./dom.js";

export class Gone extends Error {}

export async function get(path, params = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (Array.isArray(value)) value.forEach((one) => query.append(name, one));
    else if (value !== undefined && value !== null && value !== "") query.append(name, value);
  }
  const text = query.toString();
  let response;
  try {
    response = await fetch(text ? `${path}?${text}` : path, { signal });
  } catch (error) {
    if (error.name !== "AbortError") notice("The server does not answer; this is the last data it sent.");
    throw error;
  }
  notice("");
  if (response.status === 404) throw new Gone(await response.text());
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

export const ofRun = (run, path = "", params = {}, signal = undefined) =>
  get(`/api/runs/${encodeURIComponent(run)}${path}`, params, signal);

export const imageOf = (run, digest) =>
  `/api/runs/${encodeURIComponent(run)}/images/${encodeURIComponent(digest)}`;

const listeners = new Set();
const EVERY_RUN = { has: () => true };
let source = null;

export function onChange(listener) {
  listeners.add(listener);
  if (source === null) connect();
  return () => listeners.delete(listener);
}

function connect() {
  source = new EventSource("/api/events");
  source.onmessage = (event) => {
    const names = new Set(JSON.parse(event.data));
    if (names.size) listeners.forEach((listener) => listener(names));
  };
  const show = (on) => document.querySelector(".live")?.classList.toggle("on", on);
  let lost = false;
  source.onopen = () => {
    show(true);
    if (lost) listeners.forEach((listener) => listener(EVERY_RUN)); // nobody told what happened meanwhile
    lost = false;
  };
  source.onerror = () => {
    show(false);
    lost = true;
  };
}

export const connected = () => source !== null && source.readyState === EventSource.OPEN;
