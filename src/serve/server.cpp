#include "serve/server.h"

#include <httplib.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <new>
#include <optional>
#include <string_view>
#include <thread>

#include "core/platform.h"
#include "core/text.h"
#include "serve/chat.h"
#include "serve/completions.h"
#include "serve/connection.h"
#include "serve/host_names.h"
#include "serve/metrics.h"
#include "serve/workers.h"

namespace headloom::serve {
namespace {

constexpr std::chrono::milliseconds kPatience{50};
constexpr const char* kJson = "application/json";
constexpr int kBacklog = 512;  // connections that the system keeps until they are accepted

constexpr int kClientLeft = 499;  // nobody reads it, but statistics do

constexpr const char* kNoMemory =
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    "Content-Length: 96\r\n\r\n"
    R"({"error":{"message":"out of memory.","type":"server_error","param":null,"code":"out_of_memory"}})";

// Of the request that this thread answers; the library does not hand it on.
thread_local Connection* current = nullptr;

void reply(httplib::Response& response, const Reply& body, int status = 200) {
  response.status = status;
  response.set_content(dump(body), kJson);
}

void reply(httplib::Response& response, const Refusal& refusal) {
  reply(response, error_body(refusal), refusal.status);
}

Refusal too_large() { return {413, "", str("the body is larger than ", kMostBody, " bytes.")}; }
Refusal large_head() {
  return {431, "", str("the request's line and headers are larger than ", kMostHead, " bytes.")};
}
Refusal large_header() {
  return {431, "", str("a header is larger than ", CPPHTTPLIB_HEADER_MAX_LENGTH, " bytes.")};
}
Refusal too_slow() {
  return {408, "",
          str("the request did not come within ", kHeadSeconds, " s for its headers and ",
              kBodySeconds, " s for its body.")};
}

// What the exception that is being handled says to a client.
Refusal refusal_of_exception() {
  try {
    throw;
  } catch (const Refusal& refusal) {
    return refusal;
  } catch (const UsageError& error) {
    return {400, "", error.what()};
  } catch (const std::bad_alloc&) {
    return {503, "out_of_memory", "out of memory."};
  } catch (const std::exception& error) {
    return {500, "", error.what()};
  }
}
Refusal is_ending() { return {503, "", "the server is ending."}; }

// Why a request has not come whole, where that is so.
std::optional<Refusal> fault_of(const Connection& connection) {
  switch (connection.fault()) {
    case Connection::Fault::none:
      return std::nullopt;
    case Connection::Fault::slow:
      return too_slow();
    case Connection::Fault::large:
      return connection.in_body() ? too_large() : large_head();
    case Connection::Fault::large_header:
      return large_header();
    case Connection::Fault::ending:
      return is_ending();
  }
  return std::nullopt;
}

// The path of a target that names the server too, as clients of proxies write it:
// "http://127.0.0.1:8080/health" is "/health". Every other target is as it was.
std::string without_origin(std::string target) {
  const size_t scheme = target.find("://");
  if (target.starts_with('/') || scheme == std::string::npos) return target;
  const size_t path = target.find('/', scheme + 3);
  return path == std::string::npos ? "/" : target.substr(path);
}

// Whether the Accept-Encoding names an encoding that the client does not take ("br;q=0").
bool refuses_encodings(const std::string& accepted) {
  std::string list = lower_case(accepted) + ",";
  std::erase_if(list, [](char c) { return c == ' ' || c == '\t'; });
  constexpr std::string_view kZero = ";q=0";
  for (size_t at = list.find(kZero); at != std::string::npos; at = list.find(kZero, at)) {
    at += kZero.size();
    if (list[list.find_first_not_of(".0", at)] == ',') return true;
  }
  return false;
}

// Reads a body. Tokenizers take up to some 250 bytes for each byte of a text, and SentencePiece
// does not survive it where memory runs out meanwhile. So a large body is read alone, after a look
// whether there is so much memory, and what that took is given back to the system.
template <typename Read>
auto read_body(const std::string& body, Read read) {
  constexpr size_t kLarge = size_t{64} << 10, kMemory = 256;  // bytes; and for each of them
  if (body.size() < kLarge) return read();
  static std::mutex alone;
  const std::lock_guard lock(alone);
  struct Release {
    ~Release() { release_free_memory(); }
  } const afterwards;
  void* volatile const memory = std::malloc(kMemory * body.size());
  if (memory == nullptr) throw std::bad_alloc();
  std::free(memory);
  return read();
}

// Throws Refusal for a body that is not going to be read.
void check_body(const httplib::Request& request) {
  // A page of another origin cannot send this type unasked, so none uses the model behind the back
  // of whoever reads it.
  const std::string type = request.get_header_value("Content-Type");
  if (!lower_case(type).starts_with(kJson)) {
    throw Refusal(415, "",
                  str("the Content-Type is '", shown_bare(type), "', expected ", kJson, "."));
  }
  if (request.has_header("Content-Encoding")) {
    throw Refusal(
        415, "",
        str("the Content-Encoding is ", shown(request.get_header_value("Content-Encoding")),
            ", expected a body as it is."));
  }
  const bool chunked = request.has_header("Transfer-Encoding");
  const std::string length = request.get_header_value("Content-Length");
  if (!chunked && !request.has_header("Content-Length")) {
    throw Refusal(411, "", "the Content-Length is missing.");
  }
  if (chunked) {
    if (request.has_header("Content-Length")) {
      throw Refusal(400, "", "there are both Content-Length and Transfer-Encoding, expected one.");
    }
    if (lower_case(request.get_header_value("Transfer-Encoding")) != "chunked") {
      throw Refusal(
          400, "",
          str("the Transfer-Encoding is ", shown(request.get_header_value("Transfer-Encoding")),
              ", expected chunked."));
    }
    return;
  }
  if (request.get_header_value_count("Content-Length") != 1) {
    throw Refusal(400, "", "there are several headers Content-Length, expected one.");
  }
  if (length.empty() || length.find_first_not_of("0123456789") != std::string::npos) {
    throw Refusal(400, "", str("the Content-Length is ", shown(length), ", expected one integer."));
  }
  if (length.size() > 18 || std::stoull(length) > kMostBody) throw too_large();
}

// What a client waits for; cancelled once nobody does.
struct Pending {
  explicit Pending(std::unique_ptr<AnswerWriter> writer) : writer(std::move(writer)) {}
  ~Pending() {
    if (answer) answer->cancel();
  }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  const std::unique_ptr<AnswerWriter> writer;
  std::shared_ptr<Answer> answer = {};
};

// Server-sent events up to the answer's end.
class EventStream {
 public:
  EventStream(Pending& pending, Connection& connection, httplib::DataSink& sink)
      : pending_(pending), connection_(connection), sink_(sink) {}

  // False where nobody reads them.
  bool run() {
    try {
      while (!pending_.answer->done()) {
        for (const Event& event : pending_.answer->wait(kPatience)) {
          for (const Reply& chunk : pending_.writer->chunks(event)) {
            if (!send(dump(chunk))) return false;
          }
        }
        if (connection_.gone() || !probe()) return false;
      }
      if (pending_.writer->include_usage() && !send(dump(pending_.writer->usage_chunk()))) {
        return false;
      }
    } catch (const std::exception&) {  // the status is gone already
      if (!send(dump(error_body(refusal_of_exception())))) return false;
    }
    if (!send("[DONE]")) return false;
    sink_.done();
    return true;
  }

 private:
  static constexpr std::string_view kBeginning = "data: ";

  bool send(const std::string& data) {
    const std::string event = std::string(kBeginning) + data + "\n\n";
    const size_t ahead = std::exchange(ahead_, 0);
    return sink_.write(event.data() + ahead, event.size() - ahead);
  }

  // Sends the next byte of every event ahead, where that tells whether the client is there.
  bool probe() {
    if (ahead_ == kBeginning.size() || !connection_.probe_due()) return true;
    return sink_.write(&kBeginning[ahead_++], 1);
  }

  Pending& pending_;
  Connection& connection_;
  httplib::DataSink& sink_;
  size_t ahead_ = 0;
};

}  // namespace

class Server::Http : private httplib::Server {
 public:
  Http(Engine& engine, const Codec& codec, const ChatTemplate& chat, ServerOptions options)
      : engine_(engine),
        codec_(codec),
        chat_(chat),
        options_(std::move(options)),
        names_(options_.host, options_.cors),
        started_(std::time(nullptr)) {
    new_task_queue = [this] { return new Workers(static_cast<size_t>(options_.connections)); };
    set_payload_max_length(kMostBody);
    int listening = -1;
    set_socket_options([&](socket_t socket) {
      have_port_alone(socket);
      listening = socket;
    });
    set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
      return route(request, response) ? HandlerResponse::Handled : HandlerResponse::Unhandled;
    });
    set_error_handler([](const httplib::Request&, httplib::Response& response) {
      if (response.body.empty()) reply(response, refusal_of(response.status));
    });
    // Before anything is sent, so that whoever has an answer finds it counted.
    set_post_routing_handler([this](const httplib::Request&, httplib::Response& response) {
      metrics_.count(current->path, response.status);
    });
    for (const auto& [path, handler] : posts()) {
      Post(path,
           [this, handler = handler](const httplib::Request& request, httplib::Response& response) {
             guarded(handler, request, response);
           });
    }
    errno = 0;
    if (options_.port == 0) {
      port_ = bind_to_any_port(options_.host);
    } else if (bind_to_port(options_.host, options_.port)) {
      port_ = options_.port;
    }
    require(port_ > 0, "cannot listen at ", options_.host, ":", options_.port, ": ",
            errno == 0 || errno == EINVAL ? "this machine has no such address or name"
                                          : std::strerror(errno),
            ".");
    listen(listening);
    set_socket_options([](socket_t) {});
  }

  int port() const { return port_; }

  void run(const std::function<bool()>& ended) {
    std::atomic<bool> over = false;
    std::thread listener([&] {
      listen_after_bind();
      over = true;
    });
    while (!over && !(is_running() && ended())) std::this_thread::sleep_for(kPatience);
    const bool asked = !over;
    ending_ = true;
    stop();
    listener.join();
    require(asked, "the server stopped listening.");
  }

 private:
  using Handler = void (Http::*)(const httplib::Request&, httplib::Response&);
  using Table = std::vector<std::pair<std::string, Handler>>;

  static void listen(int socket) { ::listen(socket, kBacklog); }

  static const Table& posts() {
    static const Table table = {{"/v1/completions", &Http::complete},
                                {"/v1/chat/completions", &Http::complete_chat},
                                {"/tokenize", &Http::tokenize},
                                {"/detokenize", &Http::detokenize},
                                {"/apply-template", &Http::apply_template}};
    return table;
  }
  static const Table& gets() {
    static const Table table = {{"/v1/models", &Http::list_models},
                                {"/health", &Http::tell_health},
                                {"/metrics", &Http::tell_metrics},
                                {"/tokenizer_info", &Http::tell_tokenizer}};
    return table;
  }
  static Handler find(const Table& table, const std::string& path) {
    for (const auto& [known, handler] : table) {
      if (known == path) return handler;
    }
    return nullptr;
  }

  // One connection, from its first byte to its last. The library calls this in a thread of its own.
  bool process_and_close_socket(socket_t socket) override {
    Connection connection(socket, ending_);
    if (Workers::task() != Workers::Task::answer) {
      refuse_connection(connection);
      return true;
    }
    current = &connection;
    try {
      bool closed = false;
      process_request(connection, /*close_connection=*/true, closed,
                      [&](httplib::Request& request) {
                        connection.expect_body();
                        // The library would cut answers.
                        request.headers.erase("Range");
                        // The library does not look at the weights.
                        if (refuses_encodings(request.get_header_value("Accept-Encoding"))) {
                          request.headers.erase("Accept-Encoding");
                        }
                        request.ranges.clear();
                        request.path = without_origin(std::move(request.path));
                      });
      // Where the library has given up on the request.
      if (const auto refusal = fault_of(connection)) say(connection, *refusal);
    } catch (const std::exception&) {  // no memory even for an answer
      if (!connection.answered()) connection.write(kNoMemory);
    }
    current = nullptr;
    time(connection);
    connection.finish();
    return true;
  }

  void refuse_connection(Connection& connection) {
    try {
      // There may also be few, but no memory for a thread.
      const std::string why =
          Workers::task() == Workers::Task::refuse
              ? str("there are ", options_.connections, " connections already; try later.")
              : "the server has no thread for one more connection; try later.";
      say(connection, Refusal(503, "too_many_connections", why));
    } catch (const std::exception&) {
      connection.write(kNoMemory);
    }
    time(connection);
    connection.finish(/*patient=*/Workers::task() == Workers::Task::refuse);
  }

  // Where the library does not answer.
  void say(Connection& connection, const Refusal& refusal) {
    if (connection.answered()) return;
    metrics_.count(connection.path, refusal.status);
    connection.answer(refusal.status, dump(error_body(refusal)));
  }

  void time(const Connection& connection) {
    const std::chrono::duration<double> seconds =
        std::chrono::steady_clock::now() - connection.begun;
    try {
      if (connection.answered()) metrics_.time(connection.path, seconds.count());
    } catch (const std::bad_alloc&) {
      return;  // The answer has been sent; only its time is not counted.
    }
  }

  // Calls a handler; what it throws becomes the answer.
  void guarded(Handler handler, const httplib::Request& request, httplib::Response& response) {
    try {
      if (ending_) throw is_ending();
      (this->*handler)(request, response);
    } catch (const std::exception&) {
      reply(response, refusal_of_exception());
    }
  }

  // Before a body is read: whether the request is answered without one. The library's own routes
  // are regular expressions, which long paths would overflow.
  bool route(const httplib::Request& request, httplib::Response& response) {
    const bool cross = allow_origin(request, response);
    const std::string& path = request.path;
    const Handler get = find(gets(), path), post = find(posts(), path);
    const bool one_model = path.starts_with(kModels) && path.size() > std::strlen(kModels);
    if (get != nullptr || post != nullptr) current->path = path;
    if (one_model) current->path = "/v1/models/{id}";
    const std::string host = request.get_header_value("Host");
    if (!names_.has(host)) {
      reply(response, Refusal(421, "",
                              str("the Host is '", shown_bare(host), "', expected ", names_.text(),
                                  ", because the server is open to this machine alone.")));
      return true;
    }
    if (request.method == "OPTIONS" && cross) {
      preflight(request, response);
      return true;
    }
    if (request.method == "POST" && post != nullptr) {
      try {
        check_body(request);
      } catch (const Refusal& refusal) {
        reply(response, refusal);
        return true;
      }
      return false;
    }
    const bool reads = request.method == "GET" || request.method == "HEAD";
    if (reads && get != nullptr) {
      guarded(get, request, response);
    } else if (reads && one_model) {
      guarded(&Http::tell_model, request, response);
    } else if (get != nullptr || post != nullptr || one_model) {
      // No path is of both.
      response.set_header("Allow", post != nullptr ? "POST" : "GET, HEAD");
      reply(response, Refusal(405, "method_not_supported",
                              str("there is no ", shown_bare(request.method), " ", shown_bare(path),
                                  " here, expected ", post != nullptr ? "POST." : "GET.")));
    } else {
      std::vector<std::string> names[2];
      for (const auto& [known, handler] : posts()) names[0].push_back(known);
      for (const auto& [known, handler] : gets()) names[1].push_back(known);
      reply(response, Refusal(404, "",
                              str("there is no ", shown_bare(request.method), " ", shown_bare(path),
                                  " here; there are POST ", join(names[0]), " and GET ",
                                  join(names[1]), " and /v1/models/{id}.")));
    }
    return true;
  }

  // Lets pages of the origins that may ask read the answer. Whether the request is of such a page.
  bool allow_origin(const httplib::Request& request, httplib::Response& response) const {
    const std::string origin = request.get_header_value("Origin");
    if (options_.cors.empty() || origin.empty()) return false;
    const bool all =
        std::find(options_.cors.begin(), options_.cors.end(), "*") != options_.cors.end();
    if (!all &&
        std::find(options_.cors.begin(), options_.cors.end(), origin) == options_.cors.end()) {
      return false;
    }
    response.set_header("Access-Control-Allow-Origin", all ? "*" : origin);
    if (!all) response.set_header("Vary", "Origin");
    return true;
  }

  static void preflight(const httplib::Request& request, httplib::Response& response) {
    const std::string wanted = request.get_header_value("Access-Control-Request-Headers");
    const bool plain = std::all_of(wanted.begin(), wanted.end(), [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
             c == '-' || c == '_' || c == ',' || c == ' ';
    });
    response.status = 204;
    response.set_header("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    response.set_header("Access-Control-Allow-Headers",
                        plain && !wanted.empty() ? wanted : "Content-Type, Authorization");
    response.set_header("Access-Control-Max-Age", "600");
  }

  // What the library refuses by itself.
  static Refusal refusal_of(int status) {
    if (const auto refusal = fault_of(*current)) return *refusal;
    if (status == 413) return too_large();
    if (status == 414) {
      return {status, "",
              str("the request line names a path of more than ", CPPHTTPLIB_REQUEST_URI_MAX_LENGTH,
                  " bytes.")};
    }
    return {
        status, "",
        status < 500 ? "the request is no HTTP that is understood here." : "the server failed."};
  }

  void complete(const httplib::Request& request, httplib::Response& response) {
    const Asked asked = read_body(request.body, [&] {
      return parse_completion(request.body, codec_, options_.model, engine_.limits());
    });
    answer(asked, std::make_unique<Completion>(codec_, asked, options_.model), request, response);
  }

  void complete_chat(const httplib::Request& request, httplib::Response& response) {
    if (!chat_.missing().empty()) throw Refusal(400, "no_chat_template", chat_.missing());
    const Asked asked = read_body(request.body, [&] {
      return parse_chat(request.body, codec_, chat_, options_.model, engine_.limits());
    });
    answer(asked, std::make_unique<ChatCompletion>(codec_, asked, options_.model), request,
           response);
  }

  void answer(const Asked& asked, std::unique_ptr<AnswerWriter> writer,
              const httplib::Request& request, httplib::Response& response) {
    const auto pending = std::make_shared<Pending>(std::move(writer));
    pending->answer = engine_.submit(asked.request);
    Connection& connection = *current;
    if (asked.stream) {
      response.set_header("Cache-Control", "no-cache");
      const auto events = [pending, &connection](size_t, httplib::DataSink& sink) {
        return EventStream(*pending, connection, sink).run();
      };
      if (request.version == "HTTP/1.0") {  // knows no chunks: the connection's end is the text's
        response.set_content_provider("text/event-stream", events);
      } else {
        response.set_chunked_content_provider("text/event-stream", events);
      }
      return;
    }
    while (!pending->answer->done()) {
      for (const Event& event : pending->answer->wait(kPatience)) pending->writer->add(event);
      if (connection.gone()) {
        response.status = kClientLeft;
        return;
      }
      if (connection.probe_due()) connection.probe();
    }
    reply(response, pending->writer->whole());
  }

  Reply model() const {
    return {{"id", options_.model},
            {"object", "model"},
            {"created", static_cast<int64_t>(started_)},
            {"owned_by", "headloom"},
            {"max_model_len", length()}};
  }

  void list_models(const httplib::Request&, httplib::Response& response) {
    reply(response, {{"object", "list"}, {"data", Reply::array({model()})}});
  }

  void tell_model(const httplib::Request& request, httplib::Response& response) {
    const std::string id = request.path.substr(std::strlen(kModels));
    if (id != options_.model) {
      throw Refusal(404, "model_not_found",
                    str("there is no model ", shown(id), " here, but '", options_.model, "'."));
    }
    reply(response, model());
  }

  void tell_health(const httplib::Request&, httplib::Response& response) {
    const Engine::Load load = engine_.load();
    reply(response, {{"status", "ok"}, {"running", load.running}, {"waiting", load.waiting}});
  }

  void tell_metrics(const httplib::Request&, httplib::Response& response) {
    response.status = 200;
    response.set_content(metrics_.text(engine_.load()), "text/plain; version=0.0.4; charset=utf-8");
  }

  void tokenize(const httplib::Request& request, httplib::Response& response) {
    const Json object = parse_object(request.body, {"prompt", "add_special_tokens", "model"});
    check_model(object, options_.model);
    const std::string text = read_text(object, "prompt");
    const bool special = read_flag(object, "add_special_tokens", true);
    const auto end = codec_.end();
    // What /tokenizer_info calls the end is the end, whether or not a text may spell it.
    const std::vector<int64_t> tokens =
        end && text == codec_.name(*end)
            ? std::vector{*end}
            : read_body(request.body, [&] { return codec_.encode(text, special); });
    reply(response, {{"count", tokens.size()}, {"max_model_len", length()}, {"tokens", tokens}});
  }

  void detokenize(const httplib::Request& request, httplib::Response& response) {
    const Json object = parse_object(request.body, {"tokens", "model"});
    check_model(object, options_.model);
    const std::vector<int64_t> tokens = read_tokens(at(object, "tokens"), "tokens", INT64_MAX);
    for (const int64_t token : tokens) {
      if (token < 0 || token >= engine_.vocabulary()) {
        refuse("'tokens' has the token ", token, ", expected 0 to ", engine_.vocabulary() - 1, ".");
      }
    }
    Utf8Stream utf8;
    std::string text;
    for (const std::string& piece : codec_.pieces(tokens)) text += utf8.add(piece);
    reply(response, {{"prompt", text + utf8.rest()}});
  }

  void apply_template(const httplib::Request& request, httplib::Response& response) {
    if (!chat_.missing().empty()) throw Refusal(400, "no_chat_template", chat_.missing());
    reply(response, {{"prompt", parse_and_spell(request.body, chat_, options_.model)}});
  }

  void tell_tokenizer(const httplib::Request&, httplib::Response& response) {
    const auto name = [&](std::optional<int64_t> token) {
      return token ? Reply(codec_.name(*token)) : Reply();
    };
    reply(response, {{"eos_token", name(codec_.end())}, {"bos_token", name(codec_.start())}});
  }

  Reply length() const {
    const auto most = engine_.max_length();
    return most ? Reply(*most) : Reply();
  }

  static constexpr const char* kModels = "/v1/models/";

  Engine& engine_;
  const Codec& codec_;
  const ChatTemplate& chat_;
  const ServerOptions options_;
  const HostNames names_;
  const std::time_t started_;
  Metrics metrics_;
  int port_ = 0;
  std::atomic<bool> ending_ = false;
};

Server::Server(Engine& engine, const Codec& codec, const ChatTemplate& chat, ServerOptions options)
    : http_(std::make_unique<Http>(engine, codec, chat, std::move(options))) {}

Server::~Server() = default;

int Server::port() const { return http_->port(); }

void Server::run(const std::function<bool()>& ended) { http_->run(ended); }

}  // namespace headloom::serve
