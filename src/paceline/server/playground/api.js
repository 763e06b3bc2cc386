/** The server's endpoints, with every failure as one sentence. */

import { LostConnectionError, readEvents } from "./stream.js";

// The page lies one folder below the API, also behind a proxy that adds a prefix.
const API = new URL("../v1/", document.baseURI);

/** A failure to be shown as it is. `status` is that of the answer, 0 where there was none. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Speaks to one server. `key` lives as long as the page and is never stored. */
export class Client {
  key = "";

  /** The models, each with what paceline can do for it. */
  async models() {
    const response = await this.#ask("models", {});
    const { data } = await response.json();
    return data;
  }

  /** Stream one completion: yields chunks. `request` has an `endpoint` and a `body`. */
  async *complete(request, signal) {
    const response = await this.#ask(request.endpoint, {
      method: "POST",
      body: JSON.stringify(request.body),
      signal,
    });
    try {
      for await (const chunk of readEvents(response.body)) {
        if (chunk.error) throw new ServerError(chunk.error.message);
        yield chunk;
      }
    } catch (error) {
      if (error instanceof LostConnectionError) {
        throw new ServerError("The connection was lost before the answer was complete.");
      }
      if (error instanceof SyntaxError) throw new ServerError("The server sent something that is not JSON.");
      throw error;
    }
  }

  async #ask(path, options) {
    const headers = { "Content-Type": "application/json" };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(new URL(path, API), { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached.");
    }
    if (!response.ok) throw new ServerError(await refusal(response), response.status);
    return response;
  }
}

async function refusal(response) {
  try {
    const { error } = await response.json();
    if (error.message) return error.message;
  } catch {
    // Proxies answer in HTML: the status is all there is to say.
  }
  return `The server answered ${response.status} ${response.statusText}`.trim() + ".";
}
