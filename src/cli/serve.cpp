#include "serve/server.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <future>
#include <string_view>

#include "cli/arguments.h"
#include "cli/command.h"
#include "core/files.h"
#include "core/platform.h"
#include "core/text.h"
#include "model/decoder.h"
#include "serve/host_names.h"
#include "serve/limits.h"
#include "train/device.h"
#include "train/interrupt.h"
#include "train/load.h"

namespace headloom::cli {
namespace {

struct ServeArguments {
  std::string model, checkpoint = "best", device = "cpu";
  Precision precision;
  serve::ServerOptions server;
  serve::EngineOptions engine;
  CachePolicy cache;
};

// Each connection is an open file; the system's default allows 1024.
void allow_files(int64_t connections) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const auto wanted = static_cast<rlim_t>(connections) + 256;
  if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

LoadedRun load_decoder(const ServeArguments& a) {
  const at::Device device = find_device(a.device, "--device");
  LoadedRun loaded = load_run(a.model, a.checkpoint);
  const auto* const decoder = dynamic_cast<const Decoder*>(loaded.model.get());
  if (decoder == nullptr) {
    usage_error(a.model, ": is a model of kind \"", loaded.config.model.kind,
                "\", which cannot continue a text, expected a decoder.");
  }
  if (!decoder->stacks()[0]->stateful()) {
    usage_error(a.model,
                ": has a token mixer that reads whole sequences only, expected one with a state.");
  }
  hold_weights(loaded, a.precision);
  loaded.model->to(device);
  return loaded;
}

// Whether it is one as browsers send it: in lower case, without a path.
bool is_origin(const std::string& text) {
  size_t host = 0;
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (text.starts_with(scheme)) host = scheme.size();
  }
  return host > 0 && host < text.size() && text == lower_case(text) &&
         text.find_first_of("/?#@ \t", host) == std::string::npos;
}

int run_serve(ServeArguments& a) {
  return_large_blocks();
  // The OpenMP workers of this thread end with it. Beside those of the engine's thread there would
  // be more workers than processors, and OpenMP would let them sleep at every barrier.
  LoadedRun loaded = std::async(std::launch::async, load_decoder, std::cref(a)).get();
  const Codec codec(loaded.config);
  a.engine.dtype = loaded.config.train.dtype;
  a.engine.cache = a.cache.text();
  a.engine.cache_dtype = a.cache.dtype;
  a.server.model = folder_name(a.model);
  if (a.server.model.empty()) a.server.model = "headloom";
  // Each text has a request at most; beside them some are refused and some ask for other things.
  a.server.connections = a.engine.max_batch + a.engine.max_queue + 8;
  allow_files(a.server.connections);
  const serve::ChatTemplate chat(a.model, codec);
  serve::Engine engine(std::dynamic_pointer_cast<Decoder>(loaded.model), codec, a.engine);
  serve::Server server(engine, codec, chat, a.server);
  install_interrupt_handler();
  const auto length = engine.max_length();
  std::printf("serving %s, step %lld, length %s, as '%s' at http://%s:%d/v1\n", a.model.c_str(),
              static_cast<long long>(loaded.step),
              length ? std::to_string(*length).c_str() : "without limit", a.server.model.c_str(),
              serve::host_in_url(a.server.host).c_str(), server.port());
  std::fflush(stdout);
  bool said = false;
  server.run([&] {
    if (interrupted() && !said) {
      said = true;
      const serve::Engine::Load load = engine.load();
      const int64_t texts = load.running + load.waiting;
      if (texts == 0) return true;
      std::fprintf(stderr,
                   "headloom: ending when %s in progress %s done; press Ctrl-C again to stop at "
                   "once.\n",
                   texts == 1 ? "the text" : str("the ", texts, " texts").c_str(),
                   texts == 1 ? "is" : "are");
    }
    return interrupted();
  });
  return 0;
}

}  // namespace

Command serve_command() {
  return {"serve", "a decoder over HTTP, as OpenAI's completions and chats",
          "headloom serve runs/text --port 8080", [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<ServeArguments>();
            app.add_option("model", a->model, "folder of a run")->required();
            app.add_option("--host", a->server.host,
                           "address to listen at; others than this machine's own let in whoever "
                           "reaches them")
                ->check(not_empty())
                ->capture_default_str();
            app.add_option("--port", a->server.port, "0: any that is free")
                ->check(whole_number(0, 65535))
                ->capture_default_str();
            app.add_option("--max-batch", a->engine.max_batch, "texts written side by side")
                ->check(whole_number(1, 1024))
                ->capture_default_str();
            app.add_option("--max-queue", a->engine.max_queue,
                           "texts that wait for their turn; more are refused")
                ->check(whole_number(1, 4096))
                ->capture_default_str();
            app.add_option("--cors", a->server.cors,
                           "origins whose web pages may ask, as in https://a.example; *: all")
                ->delimiter(',')
                ->allow_extra_args(false)
                ->check([](const std::string& origin) {
                  return origin == "*" || is_origin(origin)
                             ? ""
                             : "'" + origin +
                                   "' is no origin, expected * or one like https://a.example "
                                   "(in lower case, without a path)";
                });
            app.footer(serve::limits_text() + "\n\n" + app.get_footer());
            add_cache_option(app, a->cache);
            add_precision_options(app, a->precision);
            add_device_option(app, a->device);
            add_checkpoint_option(app, a->checkpoint);
            return [a] { return run_serve(*a); };
          }};
}

}  // namespace headloom::cli
