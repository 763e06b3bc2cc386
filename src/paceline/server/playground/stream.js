/** Server-sent events out of a fetch body, as far as a completion stream uses them. */

/** The stream ended before the server said that it was done. */
export class LostConnectionError extends Error {}

/**
 * Yield the parsed JSON of every event until `[DONE]`.
 *
 * Leaving the loop early cancels the body, which tells the server to stop.
 */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await readOrLose(reader);
      if (done) throw new LostConnectionError();
      // A carriage return that ends a read may be half of a line end: it waits for the other half.
      const lines = (pending + value).split(/\r\n|\n|\r(?!$)/);
      pending = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const payload = line.slice(5).trim();
        if (payload === "[DONE]") return;
        yield JSON.parse(payload);
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

async function readOrLose(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new LostConnectionError();
  }
}
