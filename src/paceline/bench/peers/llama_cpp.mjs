// llama.cpp as a long-lived process: a line of JSON in, a line of JSON out.
//
//   node llama_cpp.mjs PACKAGES MODEL.gguf THREADS CONTEXT_LEN
//   out, once: {"release", "threads"}
//   in:        {"prompt_ids": [...], "max_new_tokens": n, "eos_token_ids": [...]}
//   out:       {"ids": [...]}, greedy, the end of sequence included
//
// It ends when its input ends, that is, with its parent. Between prompts it sleeps in the event loop: llama.cpp
// starts its threads for each forward and joins them after it.
//
// Tokens come from the package's native addon, below its public LlamaContextSequence.evaluate, with which the
// ids are the same. Both hand each forward and each choice of a token to a worker thread; evaluate adds
// generators, locks and a sampler's settings for every token, about 0.2 ms on the machine this was written
// on, which a small model would feel. These names are private, so the version of the package is pinned.

import { join } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

console.log = console.info = console.warn = console.error; // standard output belongs to the protocol
process.on("uncaughtException", (error) => {
    console.error(String(error.message).split("\n")[0]); // the parent shows the last line
    process.exit(1);
});

const [packages, modelPath, threads, contextLen] = process.argv.slice(2);
const entry = join(packages, "node_modules", "node-llama-cpp", "dist", "index.js");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry));
const llama = await getLlama({
    gpu: false,
    build: "never", // prebuilt binaries only
    skipDownload: true,
    maxThreads: Number(threads),
    logLevel: LlamaLogLevel.error,
});
const model = await llama.loadModel({ modelPath, gpuLayers: 0 });
const context = await model.createContext({
    contextSize: Number(contextLen),
    sequences: 1,
    threads: Number(threads),
});
const native = context._ctx;
native.setThreads(Number(threads));
const sampler = new llama._bindings.AddonSampler(model._model);
sampler.applyConfig({ temperature: 0 }); // the arg max

/** Read `ids` behind the first `start` tokens; returns the likeliest next token. */
async function read(ids, start) {
    let logits;
    for (let from = 0; from < ids.length; from += context.batchSize) {
        const part = ids.slice(from, from + context.batchSize);
        const isLast = from + part.length === ids.length;
        native.initBatch(part.length);
        const wanted = isLast ? [part.length - 1] : [];
        logits = native.addToBatch(0, start + from, Uint32Array.from(part), Uint32Array.from(wanted));
        await native.decodeBatch();
    }
    return native.sampleToken(logits[0], sampler);
}

async function answer({ prompt_ids: promptIds, max_new_tokens: maxNewTokens, eos_token_ids: eosTokenIds }) {
    const ends = new Set(eosTokenIds);
    const ids = [];
    native.removeTokenCellsFromSequence(0, 0, -1); // nothing is kept from one prompt to the next
    let next = await read(promptIds, 0);
    ids.push(next);
    while (!ends.has(next) && ids.length < maxNewTokens) {
        next = await read([next], promptIds.length + ids.length - 1);
        ids.push(next);
    }
    return ids;
}

const say = (message) => process.stdout.write(JSON.stringify(message) + "\n");
const lines = createInterface({ input: process.stdin, crlfDelay: Infinity });
// Without a parent nobody waits for an answer, and a forward that is under way must not outlive it.
lines.on("close", () => process.kill(process.pid, "SIGKILL"));
say({ release: llama.llamaCppRelease.release, threads: native.getThreads() });
for await (const line of lines) say({ ids: await answer(JSON.parse(line)) });
