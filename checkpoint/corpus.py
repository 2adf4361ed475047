"""A small stock of English, from which the tokenizer learns and of which random replies are made."""

_WORDS = """
a able about above across act add after again age ago agree air all almost alone along already also
always am among an and animal another answer any apple are area arm around art as ask at away baby back
bad bag ball bank be bear beautiful because become bed been before began begin behind being believe bell
below best better between big bird black blue boat body book both box boy bread break bright bring broke
brother brought brown build but buy by call came can car care carry cat catch caught center chair chance
change chief child children choose circle city class clean clear climb close cloud coast cold color come
common complete contain control cook cool copy corner correct could count country course cover cow create
cross cry cut dance dark daughter day dead deal dear decide deep did differ dinner direct distant do
doctor does dog done door double down draw dream dress drink drive drop dry during each ear early earth
east easy eat edge effect egg eight either else end energy engine enjoy enough enter equal even evening
event ever every example eye face fact fair fall family famous far farm fast father favor fear feed feel
feet fell few field fight figure fill final find fine finger finish fire first fish fit five flat floor
flow flower fly follow food foot for force forest forget form forward found four free fresh friend from
front fruit full fun game garden gate gather gave gentle get girl give glad glass go gold gone good got
government grass great green grew ground group grow guess guide had hair half hand happen happy hard has
hat have he head hear heard heart heat heavy held hello help her here high hill him his history hold
hole home hope horse hot hotel hour house how however huge human hundred hurry husband i ice idea if
imagine important in inch include inside instead interest into iron is island it job join joy jump just
keep kept key kind king kitchen knew know lady lake land language large last late laugh law lay lead
learn least leave led left leg less lesson let letter level lie life lift light like line list listen
little live long look lost lot loud love low machine made magic main make man many map mark market matter
may me mean measure meat meet men middle might mile milk million mind minute miss model modern moment
money month moon more morning most mother mountain mouth move much music must my name nation nature near
need neighbor never new next nice night nine no noise noon nor north nose not note nothing notice now
number object observe ocean of off offer office often oh oil old on once one only open or orange order
other our out over own page paint pair paper parent park part party pass past path pattern pay people
perhaps person picture piece place plain plan plane planet plant play please point poor position possible
power practice prepare present pretty problem produce promise proud public pull push put quart question
quick quiet quite race radio rain raise ran reach read ready real reason record red remember repeat
reply rest result rich ride right ring rise river road rock roll room root rope rose round row rule run
safe said sail salt same sand sat save saw say school science sea search season seat second see seed
seem self send sense sentence serve set seven several shall shape share she sheet ship shirt shoe shop
short should shoulder show side sight sign silent silver similar simple since sing sister sit six size
skin sky sleep slow small smell smile snow so soft soil some son song soon sound south space speak special
speech speed spend spoke spot spread spring square stand star start state station stay steel step still
stone stood stop store story straight strange street string strong student study such sudden sugar suit
summer sun supply support sure surface sweet swim system table tail take talk tall teach team teeth tell
ten test than thank that the their them then there these they thick thin thing think third this those
though thought three through time tiny to today together told tomorrow too took tool top total touch
toward town track trade train travel tree triangle trip trouble true trust try turn twelve twenty two
type uncle under understand unit until up upon us use usual valley value very view village visit voice
wait walk wall want war warm was wash watch water wave way we wear weather week weight well went were west
what wheel when where which while white who whole why wide wife wild will win wind window winter wish with
woman women wonder wood word work world would write wrong year yellow yes yet you young your
"""
COMMON_WORDS: tuple[str, ...] = tuple(_WORDS.split())

SENTENCES: tuple[str, ...] = (
    "What is the weather like today?",
    "Please tell me a short story about the sea.",
    "I can see and hear you, and I can speak with you.",
    "The children walk to school in the morning.",
    "How many birds are there in the picture?",
    "Yes, you are right! That is a good question.",
    "No, I do not think so, but thank you.",
    "Where did you hear that sound?",
    "It was a dark night, and the wind was strong.",
    "You are a helpful assistant.",
    "Describe what you see in this image.",
    "Count from one to ten, please.",
)

ROLES: tuple[str, ...] = ("system", "user", "assistant")
SENTENCE_ENDS: tuple[str, ...] = (".", "?", "!")
PAUSES: tuple[str, ...] = (",",)


def training_lines() -> list[str]:
    """Return the lines from which the tokenizer is trained, the same for every call.

    Each common word stands with a space before it, as inside a sentence, so that it becomes one token.  A
    role stands at the start of a line, as after ``<|im_start|>``: the config names the token of "user".
    """
    words = " ".join(COMMON_WORDS)
    return [f" {words}", *SENTENCES, *(f"{role}\n" for role in ROLES for _ in range(50))]
