#include "data/sentencepiece.h"

#include <dlfcn.h>

#include "core/error.h"

namespace headloom::data {
namespace {

// Debian's libsentencepiece exports a FLAGS_minloglevel of 32 bytes and libc10 one of 4. Linked
// into one program the two become one symbol, and the constructor of the longer writes over the
// variables after the shorter. RTLD_LOCAL keeps the library's symbols from others, RTLD_DEEPBIND
// makes it find its own first.
int flags() {
#ifdef __SANITIZE_ADDRESS__
  return RTLD_NOW | RTLD_LOCAL;  // the sanitizer's runtime refuses RTLD_DEEPBIND
#else
  return RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND;
#endif
}

const SentencePieceLibrary* opened() {
  // It stands beside the library or in the run path of the program that this is linked into.
  const char* name = "libheadloom_sentencepiece.so";
  void* library = ::dlopen(name, flags());
  if (library == nullptr) {
    const char* problem = ::dlerror();
    fail(name, ": cannot be loaded (", problem == nullptr ? "no reason given" : problem,
         "); a SentencePiece model needs it and Debian's package libsentencepiece0.");
  }
  using Get = const SentencePieceLibrary* (*)();
  const auto get = reinterpret_cast<Get>(::dlsym(library, "headloom_sentencepiece"));
  require(get != nullptr, name, ": is not Headloom's library of this name.");
  return get();
}

}  // namespace

const SentencePieceLibrary& sentencepiece() {
  static const SentencePieceLibrary* const library = opened();
  return *library;
}

}  // namespace headloom::data
