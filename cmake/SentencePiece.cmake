# libheadloom_sentencepiece: SentencePiece behind the interface of src/data/sentencepiece.h.
#
# Nothing links it: src/data/sentencepiece.cpp opens it apart, because SentencePiece's library and PyTorch's
# export symbols of the same names (tests/python/test_symbols.py).

find_library(SENTENCEPIECE_TRAIN_LIBRARY sentencepiece_train REQUIRED)
find_library(SENTENCEPIECE_LIBRARY sentencepiece REQUIRED)
add_library(headloom_sentencepiece SHARED ${PROJECT_SOURCE_DIR}/src/data/sentencepiece_library.cpp)
target_include_directories(headloom_sentencepiece PRIVATE ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(headloom_sentencepiece PRIVATE ${SENTENCEPIECE_TRAIN_LIBRARY} ${SENTENCEPIECE_LIBRARY})
set_target_properties(headloom_sentencepiece PROPERTIES CXX_VISIBILITY_PRESET hidden
                                                        VISIBILITY_INLINES_HIDDEN ON)
